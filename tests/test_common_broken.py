"""common/data/broken.py: what is counted, when a run stops, and what the message says."""

from refusals import refused

from common.data.broken import BrokenSample, BrokenSamples, TooManyBroken, check_whole, readable_items


def test_the_counter_stops_clearly_above_the_share_and_only_after_enough_samples():
    counter = BrokenSamples(max_share=0.1)
    for number in range(25):
        counter.record(BrokenSample("a.tar", f"k{number}", "empty caption: ''" if number % 2 else "missing caption"))
    counter.saw(74)
    counter.check()  # 25 of 99, not enough seen
    counter.saw(51)
    assert (counter.seen, counter.count) == (150, 25)
    counter.check()  # 15 are allowed, and 3 standard deviations of chance above that is 26.6
    counter.record(BrokenSample("b.tar", "", "shard is cut"))
    counter.record(BrokenSample("b.tar", "", "shard is cut"))
    kinds = "13 x missing caption, 12 x empty caption, 2 x shard is cut"
    words = rf"27 of 152 .* \(17.76%\); .* 10.00% .* \(max_broken_share\). .*{kinds}. First .*\n  a.tar \[k0\]: mis"
    refused((words, counter.check), error=TooManyBroken)


def test_a_whole_set_is_judged_below_the_number_that_a_run_waits_for():
    broken = [BrokenSample("a.json", f"row {number}", "missing image") for number in range(6)]
    check_whole(4, broken[:5], 0.01)
    check_whole(40, broken, 0.1)  # 4.6 are allowed, and 3 standard deviations above that
    refused(
        (r"6 of 46 samples are broken .*\n  a.json \[row 0\]", lambda: check_whole(40, broken, 0.01)),
        error=TooManyBroken,
    )


def test_a_share_of_nothing_stops_at_the_first_broken_sample():
    counter = BrokenSamples(max_share=0.0)
    counter.saw(5000)
    counter.check()
    counter.record(BrokenSample("a.tar", "k", "x"))
    refused(("1 of 5001", counter.check), error=TooManyBroken)


def test_the_counter_lists_a_sample_once():
    counter = BrokenSamples(max_share=0.0)
    for _ in range(99):
        counter.record(BrokenSample("a.tar", "k", "missing caption"))
    counter.record(BrokenSample("b.tar", "", "shard is cut: at byte 7"))
    lines = r"\n  a.tar \[k\]: missing caption\n  b.tar: shard is cut: at byte 7$"
    refused((lines, counter.check), error=TooManyBroken)
    assert counter.count == 100


class Some(list):
    def __getitem__(self, index):
        if index in (0, 3):
            raise BrokenSample("some", str(index), "cut off")
        return index


def test_what_cannot_be_read_is_passed_over():
    assert readable_items(Some(range(6)), 3) == [1, 2, 4]
    assert readable_items(Some(range(6)), 10) == [1, 2, 4, 5]
