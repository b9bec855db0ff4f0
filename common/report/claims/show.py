"""The claims of a paper with both verdicts as text, for the terminal and as a page of Markdown."""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy import stats

from common.report.claims.decide import audit, measured, measured_at_every_scale
from common.report.claims.expressions import cells
from common.report.claims.intervals import SEEDS_ONLY
from common.report.claims.ours import at_settings, our_cells
from common.report.claims.read import FAILS, HOLDS, Claim, load_claims, load_paper_tables
from common.report.claims.verdict import (
    DECIDED,
    DEPENDS,
    HOLDS_BY_LITTLE,
    NEEDS,
    NO_DIFFERENCE,
    NOT_RUN,
    NOT_TRAINED,
    ONE_SEED,
    OUTSIDE,
    UNCHECKED,
    UNDECIDED,
    UNLIKE,
    Finding,
    Verdict,
    at_every_setting,
)
from common.report.formats import markdown_text
from common.report.table import Table

ORDER = (
    HOLDS, HOLDS_BY_LITTLE, NO_DIFFERENCE, FAILS, DEPENDS, UNDECIDED, OUTSIDE, NOT_TRAINED, ONE_SEED, UNLIKE,
    UNCHECKED,
    NOT_RUN, NEEDS,
)  # fmt: skip
_WAYS = ("", SEEDS_ONLY, "by construction", "parity check", "by test")
_FALSE_DISCOVERIES = 0.05  # expected share among the answers of a paper
READING = (
    "Audit: do the numbers that the paper itself prints bear its sentence out? Measured: do ours, at the scale that is "
    "named? A margin is positive where the claim holds. Its interval is over seeds and test pictures; where the hits "
    "of the pictures were not kept it is over seeds only, and the verdict is “on these pictures”. It is of 95 %, or "
    "wider where one of several comparisons is enough to refute a claim, or of 90 % where a comparison says “at least "
    "as good as”. “Pooled” takes the spread over seeds from all rows of the column, with the seed as a block; “paired” "
    "from the comparison's own values. “Not pooled” names rows whose spread differs from that of the others "
    "(Brown-Forsythe test); “perhaps with a wider spread” those of which this is not clear. One seed decides nothing, "
    "nor does a row that did not train; runs in another state than the one a claim is about read “outside the claim's "
    "regime”. Shown is the "
    "comparison that decides: of a claim that holds the one nearest to its threshold, of one that does not the "
    "clearest, of an open one that which blocks. “Depends on the setting”: the verdict is another one at a setting "
    "whose validation figure lies within one standard error of a row's best. A table whose seeds were planned decides "
    "at 99 % by the first ones and at 96 % by all. A claim over more than three comparisons has a second verdict, on "
    "their mean for each table and unit. “No difference beyond x”: the 90 % interval lies within x, half the paper's "
    "own difference in log-odds at our control's validation level, at least 1 point. q is the share of false answers "
    "among those of the paper that are as clear (Benjamini and Hochberg). What follows from a definition or a count, "
    "and what a test holds, is counted apart."
)

_AGAIN = (
    "The command below a verdict measures its rows again. `<folder>` and `<path>` stand for your "
    "[images](../../docs/data.md), [weights](../../docs/weights.md) and other files. With `ROWS` the command prints "
    "these rows. Without `ROWS` it measures the whole table and judges its claims again."
)


@dataclass(frozen=True)
class Judged:
    """A claim with its verdicts; `measured` has one for each scale, the most telling first."""

    claim: Claim
    audit: Verdict
    measured: tuple[Verdict, ...]


@dataclass(frozen=True)
class PaperClaims:
    """All claims of a paper, in the order of their file; `paper` is its folder."""

    paper: str
    title: str
    judged: tuple[Judged, ...]

    @property
    def controls(self) -> int:
        """How many are controls of ours beside a claim, which do not count."""
        return sum(bool(one.claim.control_of) for one in self.judged)


def judge(
    folder: str | Path,
    tables: Sequence[Table],
    sources: Sequence[str] | None = None,
) -> PaperClaims | None:
    """Both verdicts of the claims of a paper folder; None if it has no claims.yaml.

    Args:
        folder: with claims.yaml and paper_tables.yaml.
        tables: ours, of any papers; of changed tables only those near the best of a search.
        sources: tables and experiments; only claims that refer to one of them; None = all claims.
    Raises:
        ClaimError: one of the two files is broken.
    """
    folder = Path(folder)
    if not (folder / "claims.yaml").is_file():
        return None
    printed = load_paper_tables(folder / "paper_tables.yaml")
    tables = [table for table in tables if table.paper == folder.name]
    chosen, near = ([table for table in tables if bool(table.settings) == is_near] for is_near in (False, True))
    ours = our_cells(chosen)
    elsewhere = {settings: our_cells(changed) for settings, changed in at_settings(chosen, near).items()}

    def verdicts(claim: Claim) -> tuple[Verdict, ...]:
        used = [cell for cell in cells(*claim.measured) if elsewhere]

        def at(verdict: Verdict) -> dict[str, Verdict]:
            here = ours.get(verdict.scale, {})
            there = {settings: by_scale.get(verdict.scale, {}) for settings, by_scale in elsewhere.items()}
            return {
                settings: measured(claim, printed, numbers, verdict.scale)
                for settings, numbers in there.items()
                if any(cell in here and numbers[cell].number != here[cell].number for cell in used)
            }

        return tuple(at_every_setting(one, at(one)) for one in measured_at_every_scale(claim, printed, ours))

    claims = load_claims(folder / "claims.yaml", printed)
    asked = (claim for claim in claims if sources is None or claim.refers_to(sources))
    judged = (Judged(claim, audit(claim, printed), verdicts(claim)) for claim in asked)
    return PaperClaims(folder.name, printed.title, tuple(judged))


def with_q(claims: PaperClaims) -> PaperClaims:
    """The claims with q values at the most telling scale of each: the paper is one family of tests.

    It contains all claims that numbers over seeds decide, each with its answer, its equivalence, and those of its mean;
    no exact claims, no claims decided by tests, no audits, no controls of ours.
    """
    firsts = [judged.measured[0] for judged in _of_the_paper(claims)]
    verdicts = [
        verdict for first in firsts for verdict in (first, first.mean) if verdict is not None and not verdict.how
    ]
    verdicts = [verdict for verdict in verdicts if verdict.verdict in (*DECIDED, DEPENDS, UNDECIDED)]
    tests = [
        (id(verdict), kind, p)
        for verdict in verdicts
        for kind in ("p", "p_equal")
        if (p := getattr(verdict, kind)) is not None
    ]
    adjusted = stats.false_discovery_control([p for *_, p in tests]) if tests else []
    q = {(of, kind): float(value) for (of, kind, _), value in zip(tests, adjusted)}

    def adjusted_verdict(verdict: Verdict | None) -> Verdict | None:
        if verdict is None:
            return None
        kind = "p_equal" if verdict.verdict == NO_DIFFERENCE else "p"
        return replace(verdict, q=q.get((id(verdict), kind)), mean=adjusted_verdict(verdict.mean))

    judged = (replace(one, measured=(adjusted_verdict(one.measured[0]), *one.measured[1:])) for one in claims.judged)
    return replace(claims, judged=tuple(judged))


def _of_the_paper(claims: PaperClaims) -> list[Judged]:
    return [judged for judged in claims.judged if not judged.claim.control_of]


def counts(claims: PaperClaims) -> tuple[str, str]:
    """Number of claims by verdict, as text: audit, and measured at the most telling scale of each claim.

    The ways of `way_of` stand apart; controls of ours do not count.
    """
    judged_of_paper = _of_the_paper(claims)
    firsts = [judged.measured[0] for judged in judged_of_paper]
    measured = []
    for way in _WAYS:
        verdicts = Counter(verdict.verdict for verdict in firsts if way_of(verdict) == way)
        measured += [f"{way}: {_counted(verdicts)}" if way else _counted(verdicts)] if verdicts else []
    return _counted(Counter(judged.audit.verdict for judged in judged_of_paper)), "; ".join(measured)


def _counted(verdicts: Counter) -> str:
    return ", ".join(f"{verdicts[kind]} {_PLURAL.get(kind, kind)}" for kind in ORDER if verdicts[kind])


def way_of(verdict: Verdict) -> str:
    """How a verdict came about: "by test", `Claim.exact`, "on these pictures"; else empty."""
    has_interval = verdict.verdict in (*DECIDED, DEPENDS, UNDECIDED) and verdict.seeds_only
    return verdict.how or (SEEDS_ONLY if has_interval else "")


def headline(verdict: Verdict) -> str:
    """The verdict in a few words: "holds at demo scale", "not run yet: table3, 4 rows", "held by test <name>, ..."."""
    return "; ".join(_in_words(verdict))


def _in_words(verdict: Verdict, with_evidence: bool = False) -> list[str]:
    # a headline in parts: the verdict, then what stands beside it
    if verdict.how == "by test" or (verdict.how and not verdict.scale):
        names = ", ".join(name.split("::")[-1] for name in verdict.reason.split(", "))
        by_test = f"{'held' if verdict.verdict == HOLDS else 'refuted'} by test {names}, run with the tests"
        return [by_test] if verdict.how == "by test" else [f"{verdict.verdict} {verdict.how}", by_test]
    if verdict.verdict in (NOT_RUN, NEEDS, UNLIKE, UNCHECKED):
        reason = f"{' ' if verdict.verdict == NEEDS else ': '}{verdict.reason}" if verdict.reason else ""
        return [f"{verdict.verdict}{reason}"]
    at = f" at {verdict.scale} scale" if verdict.scale else ""
    how = f" {verdict.how}" if verdict.how == "by construction" else f" in a {verdict.how}" if verdict.how else ""
    pictures = f" {SEEDS_ONLY}" if way_of(verdict) == SEEDS_ONLY else ""
    every = " as a whole" if verdict.mean else ""

    def reasons(part: Verdict) -> str:
        return f" ({text})" if with_evidence and (text := evidence(part)) else ""

    parts = (
        f"{_kind(verdict)}{every}{how}{at}{pictures}",
        verdict.mean and f"on the mean of its comparisons: {_kind(verdict.mean)}{reasons(verdict.mean)}",
        verdict.unlike and f"one comparison of {UNLIKE}: {verdict.unlike}",
        verdict.later and f"threshold chosen after the data: {verdict.later.verdict}{reasons(verdict.later)}",
        verdict.departure and f"departure: {verdict.departure}",
    )
    return [part for part in parts if part]


def _kind(verdict: Verdict) -> str:
    if verdict.within is None:
        return verdict.verdict
    return verdict.verdict.removesuffix("x") + f"{verdict.within:.2g} points"


def evidence(verdict: Verdict) -> str:
    """The comparison that decides, its interval and rule, and how many hold, as text."""
    parts = _evidence(verdict)
    if verdict.mean:
        parts.append(f"on the mean: {evidence(verdict.mean)}")
    if verdict.later:
        parts.append(f"after the data: {evidence(verdict.later)}")
    return "; ".join(parts)


def _evidence(verdict: Verdict) -> list[str]:
    parts = []
    if verdict.decisive is not None and verdict.margin is not None:
        smallest = "least clear" if verdict.decisive.interval else "smallest"
        which = {HOLDS: smallest, FAILS: "clearest"}.get(verdict.verdict, "open")
        parts = [f"{f'{which} margin ' if verdict.of > 1 else 'margin '}{effect(verdict.decisive)}"]
        parts += [verdict.decisive.basis] if verdict.decisive.basis else []
    incomplete = verdict.verdict in (NOT_RUN, NEEDS)
    has_margins = any(finding.margin is not None or not incomplete for finding in verdict.findings)
    if has_margins and verdict.of > 1:
        parts.append(f"{verdict.holding} of {verdict.of} comparisons hold{' so far' * incomplete}")
    reasoned = (*DECIDED, DEPENDS, UNDECIDED, OUTSIDE, NOT_TRAINED, ONE_SEED)
    if verdict.verdict in reasoned and verdict.reason and not verdict.how:
        parts.append(verdict.reason)
    if verdict.q is not None:
        above = f", above the {_FALSE_DISCOVERIES:.0%} of the paper's claims" if verdict.q > _FALSE_DISCOVERIES else ""
        parts.append(f"q {verdict.q:.2g}" + (above if verdict.verdict in DECIDED else ""))
    return parts


def effect(finding: Finding) -> str:
    """The margin with its interval: "+3.2 ± 1.1 points", or "+3.2 [1.0, 5.2] points" where it is not symmetric.

    It has enough digits that rounding moves no end across the threshold.
    """
    if finding.margin is None:
        return ""
    if finding.interval is None and abs(finding.margin) < 1.0e-9:  # a tie, up to rounding
        return f"0 {finding.unit}".strip()
    digits = _digits(finding)
    text = _signed(finding.margin, digits)
    if finding.interval is not None:
        low, high = finding.interval
        below, above = (f"{size:.{digits}f}" for size in (finding.margin - low, high - finding.margin))
        text += f" ± {below}" if below == above else f" [{_number(low, digits)}, {_number(high, digits)}]"
    return f"{text} {finding.unit}".strip()


def to_text(claims: PaperClaims, width: int = 100) -> str:
    """For the terminal: a line or two for each claim, then its verdicts."""
    if not claims.judged:
        return ""
    lines = ["Claims that these tables touch (audit: the paper's own numbers; measured: ours)"]
    for judged in claims.judged:
        lines += textwrap.wrap(f"{judged.claim.id:<4} {judged.claim.claim}", width, subsequent_indent="     ")
        verdicts = f"audit: {headline(judged.audit)}; measured: {_with_evidence(judged.measured[0])}"
        lines += textwrap.wrap(f"     {verdicts}", width, subsequent_indent="     ")
    return "\n".join(lines) + "\n"


def to_page(claims: PaperClaims, sources: Callable[[Claim, str], Sequence[str]] = lambda claim, scale: ()) -> str:
    """GitHub Markdown: all claims in a table of a few words each, then a section for each, which its id leads to.

    Args:
        sources: (claim, scale of a verdict, "" = none) -> what decided it and how to measure it again, as Markdown.
    """
    audits, measured = counts(claims)
    lines = ["| claim | sentence | audit | measured |", "| --- | --- | --- | --- |"]
    sections = ["## How to read the verdicts", READING, _AGAIN]
    for judged in claims.judged:
        claim = judged.claim
        sentence = markdown_text(claim.claim)
        words = (judged.audit.verdict, _in_short(judged.measured[0]))
        lines.append(f"| [{claim.id}](#{claim.id.lower()}) | {sentence} | {' | '.join(map(markdown_text, words))} |")
        verdicts = [("audit", judged.audit), *(("measured", verdict) for verdict in judged.measured)]
        stated = []
        for side, verdict in verdicts:
            first, *beside = _in_words(verdict, with_evidence=True)
            more = [*map(markdown_text, [*_evidence(verdict), *beside])]
            if side == "measured" and (verdict.scale or verdict.verdict == NOT_RUN):
                more += sources(claim, verdict.scale)
            stated += [f"- {side}: {markdown_text(first)}", *(f"  - {text}" for text in more)]
        sections += [f"## {claim.id}", f"{sentence} *({markdown_text(claim.where)})*", "\n".join(stated), _rule(claim)]
    controls = sum(bool(judged.claim.control_of) for judged in claims.judged)
    number = (
        f"{len(claims.judged) - controls} claims of the paper"
        + f", and {controls} controls of ours, not counted" * bool(controls)
    )
    total = f"{number}. Audit: {audits}. Measured: {measured}. [How to read the verdicts](#how-to-read-the-verdicts)"
    head = [f"# Claims: {claims.title}", total, "\n".join(lines)]
    return "\n\n".join([*head, *sections]) + "\n"


def _in_short(verdict: Verdict) -> str:
    if verdict.verdict == NEEDS:
        return headline(verdict)
    mean = f"; on the mean {_kind(verdict.mean)}" if verdict.mean else ""
    scale = f" ({verdict.scale})" if verdict.scale else ""
    return f"{_kind(verdict)}{f' {verdict.how}' * bool(verdict.how)}{mean}{scale}"


def _rule(claim: Claim) -> str:
    decided = [f"`{text}`" for text in (*claim.measured_text, *claim.tests)] or [claim.needs]
    control = f"A control of ours beside {claim.control_of}. " if claim.control_of else ""
    rule = f"{control}Decided by {'; '.join(decided)}."
    if claim.later:
        rule += f" Chosen after the data: {'; '.join(f'`{text}`' for text in claim.later_text)}."
    if claim.regime:
        rule += f" Only of runs with {'; '.join(f'`{text}`' for text in claim.regime_text)}."
    if claim.threshold:
        rule += f" Threshold as of revision {claim.threshold}."
    return f"{rule} {markdown_text(claim.note)}".rstrip()


def style_of(verdict: Verdict) -> str:
    """The class of a verdict on the page."""
    return _STYLES.get(verdict.verdict, "open")


def _with_evidence(verdict: Verdict) -> str:
    reasons = evidence(verdict)
    return f"{headline(verdict)} ({reasons})" if reasons else headline(verdict)


_STYLES = {
    HOLDS: "holds", HOLDS_BY_LITTLE: "holds", NO_DIFFERENCE: "tie", FAILS: "fails", UNDECIDED: "undecided",
    DEPENDS: "undecided", OUTSIDE: "undecided", NOT_TRAINED: "undecided", ONE_SEED: "undecided",
}  # fmt: skip
_PLURAL = {
    HOLDS: "hold", HOLDS_BY_LITTLE: "hold by less than x", FAILS: "do not hold", NEEDS: "need what is not here",
    UNLIKE: "of unlike protocols", DEPENDS: "depend on the setting",
}  # fmt: skip


def _digits(finding: Finding) -> int:
    # Decimals that show the margin and its interval with two digits, and no end of it as 0
    low, high = finding.interval or (finding.margin, finding.margin)
    size = (high - low) / 2 or abs(finding.margin or 0.0)
    size = min(size, abs(low), abs(high)) if low and high else size
    return next((digits for digits in (1, 2, 3, 4) if size >= 10.0 ** (1 - digits) * 0.1), 1 if size == 0 else 4)


def _number(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.removeprefix("-")


def _signed(value: float, digits: int) -> str:
    text = _number(value, digits)
    return text if text.startswith("−") else f"+{text}"
