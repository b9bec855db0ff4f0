"""What a message proposes for a mistyped word."""

import pytest

from common.base.arguments import accepted, did_you_mean

TABLES = [f"table{number}" for number in range(1, 10)]


@pytest.mark.parametrize(
    ("word", "known", "message"),
    [
        # a short list is shown, a long one only where nothing in it is near
        ("smkoe", ["smoke", "demo"], "expected one of: smoke, demo; did you mean smoke?"),
        ("huge", ["smoke", "demo"], "expected one of: smoke, demo"),
        ("x", [], "expected one of: none"),
        ("tabel2", TABLES, "did you mean table2?"),
        ("table22", TABLES, "did you mean table2?"),
        ("figure", TABLES, f"expected one of: {', '.join(TABLES)}"),
        # as near as each other: three at most, in the order of the list
        ("table", TABLES, "did you mean table1, table2 or table3?"),
        ("fig4", ["fig4a", "fig4b"], "expected one of: fig4a, fig4b; did you mean fig4a or fig4b?"),
        # what others call it
        ("optim.lr", ["optim.learning_rate", "optim.steps"], "expected one of: optim.learning_rate, optim.steps; "
         "did you mean optim.learning_rate?"),
    ],
)  # fmt: skip
def test_a_message_names_what_is_near(word, known, message):
    assert accepted(word, known) == message


def test_no_hint_where_nothing_is_near():
    assert did_you_mean("figure", TABLES) == ""
