"""The claims of a paper with both verdicts, in words, for the terminal and as Markdown."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.report.claims.decide import (
    EFFECT,
    NEEDS,
    NOT_RUN,
    ONE_SEED,
    UNCHECKED,
    UNDECIDED,
    UNLIKE,
    Finding,
    Verdict,
    audit,
    measured_at_every_scale,
    our_cells,
)
from common.report.claims.read import FAILS, HOLDS, Claim, load_claims, load_paper_tables
from common.report.experiments import Experiment
from common.report.formats import markdown_text
from common.report.table import Table

_ORDER = (HOLDS, FAILS, UNDECIDED, ONE_SEED, EFFECT, UNLIKE, UNCHECKED, NOT_RUN, NEEDS)
_WAYS = ("", "by construction", "parity check", "by test")
READING = (
    "Audit: do the numbers that the paper itself prints bear its sentence out? Measured: do ours, at the scale that is "
    "named? A margin is positive where the claim holds. Its interval is over seeds: 95 %, or wider where one of "
    "several comparisons is enough to refute a claim. “Pooled” takes the spread from all rows of the column, with the "
    "seed as a block; “paired” from the comparison's own values. One seed decides nothing. Shown is the comparison "
    "that decides: of a claim that holds the one nearest to its threshold, of one that does not the clearest, of an "
    "open one that which blocks. What follows from a definition or a count, and what a test holds, is counted apart."
)


@dataclass(frozen=True)
class Judged:
    """A claim with its verdicts; `measured` has one for each scale, the most telling first."""

    claim: Claim
    audit: Verdict
    measured: tuple[Verdict, ...]


@dataclass(frozen=True)
class PaperClaims:
    """All claims of a paper: its folder, its title, and the claims in the order of their file."""

    paper: str
    title: str
    judged: tuple[Judged, ...]


def judge(folder: str | Path, tables: Sequence[Table], experiments: Sequence[Experiment]) -> PaperClaims | None:
    """Both verdicts of all claims of a paper folder; None if it has no claims.yaml.

    Args:
        folder: with claims.yaml and paper_tables.yaml.
        tables: of ours, of any papers; with changed rows or settings left out.
        experiments: of ours, of any papers.
    Raises:
        ClaimError: if one of the two files is broken.
    """
    folder = Path(folder)
    if not (folder / "claims.yaml").is_file():
        return None
    printed = load_paper_tables(folder / "paper_tables.yaml")
    ours = our_cells(*([result for result in kind if result.paper == folder.name] for kind in (tables, experiments)))
    judged = (
        Judged(claim, audit(claim, printed), measured_at_every_scale(claim, printed, ours))
        for claim in load_claims(folder / "claims.yaml", printed)
    )
    return PaperClaims(folder.name, printed.title, tuple(judged))


def touching(claims: PaperClaims, sources: Sequence[str]) -> PaperClaims:
    """Only the claims that refer to one of these tables or experiments."""
    kept = tuple(judged for judged in claims.judged if set(judged.claim.sources) & set(sources))
    return PaperClaims(claims.paper, claims.title, kept)


def counts(claims: PaperClaims) -> tuple[str, str]:
    """How many claims got which verdict, as text: audit, and measured at the most telling scale of each claim.

    What holds by construction, by a test or in a parity check of weights stands apart.
    """
    firsts = [judged.measured[0] for judged in claims.judged]
    measured = []
    for way in _WAYS:
        verdicts = Counter(verdict.verdict for verdict in firsts if verdict.how == way)
        measured += [f"{way}: {_counted(verdicts)}" if way else _counted(verdicts)] if verdicts else []
    return _counted(Counter(judged.audit.verdict for judged in claims.judged)), "; ".join(measured)


def _counted(verdicts: Counter) -> str:
    return ", ".join(f"{verdicts[kind]} {_PLURAL.get(kind, kind)}" for kind in _ORDER if verdicts[kind])


def headline(verdict: Verdict) -> str:
    """The verdict in a few words: "holds at demo scale", "not run yet: table3, 4 rows", "held by test <name>, ..."."""
    if verdict.how == "by test" or (verdict.how and not verdict.scale):
        names = ", ".join(name.split("::")[-1] for name in verdict.reason.split(", "))
        by_test = f"{'held' if verdict.verdict == HOLDS else 'refuted'} by test {names}, run with the tests"
        return by_test if verdict.how == "by test" else f"{verdict.verdict} {verdict.how}; {by_test}"
    if verdict.verdict in (NOT_RUN, NEEDS, UNLIKE, UNCHECKED):
        reason = f"{' ' if verdict.verdict == NEEDS else ': '}{verdict.reason}" if verdict.reason else ""
        return f"{verdict.verdict}{reason}"
    at = f" at {verdict.scale} scale" if verdict.scale else ""
    how = f" {verdict.how}" if verdict.how == "by construction" else f" in a {verdict.how}" if verdict.how else ""
    unlike = f"; one comparison of {UNLIKE}: {verdict.unlike}" if verdict.unlike else ""
    later = f"; threshold chosen after the data: {verdict.later.verdict}" if verdict.later else ""
    return f"{verdict.verdict}{how}{at}{unlike}{later}"


def evidence(verdict: Verdict) -> str:
    """What a verdict rests on, in short: the comparison that decides, its interval and rule, how many hold."""
    parts = []
    if verdict.verdict == EFFECT:
        parts = [f"{effect(finding)}; {finding.basis}" for finding in verdict.findings]
    elif verdict.decisive is not None and verdict.margin is not None:
        which = {HOLDS: "smallest", FAILS: "clearest"}.get(verdict.verdict, "open")
        parts = [f"{f'{which} margin ' if verdict.of > 1 else 'margin '}{effect(verdict.decisive)}"]
        parts += [verdict.decisive.basis] if verdict.decisive.basis else []
    incomplete = verdict.verdict in (NOT_RUN, NEEDS)
    has_margins = any(finding.margin is not None or not incomplete for finding in verdict.findings)
    if has_margins and verdict.of > 1 and verdict.verdict != EFFECT:
        parts.append(f"{verdict.holding} of {verdict.of} comparisons hold{' so far' * incomplete}")
    if verdict.verdict in (UNDECIDED, ONE_SEED, EFFECT) and verdict.reason:
        parts.append(verdict.reason)
    if verdict.later:
        parts.append(f"after the data: {evidence(verdict.later)}")
    return "; ".join(parts)


def effect(finding: Finding) -> str:
    """The margin with its interval: "+3.2 ± 1.1 points", or "+3.2 [1.0, 5.2] points" where it is not symmetric.

    So many digits that no rounding moves an end to the other side of the threshold.
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
    """For the terminal: a line or two per claim, the verdicts first."""
    if not claims.judged:
        return ""
    lines = ["Claims that these tables touch (audit: the paper's own numbers; measured: ours)"]
    for judged in claims.judged:
        lines += textwrap.wrap(f"{judged.claim.id:<4} {judged.claim.claim}", width, subsequent_indent="     ")
        verdicts = f"audit: {headline(judged.audit)}; measured: {_with_evidence(judged.measured[0])}"
        lines += textwrap.wrap(f"     {verdicts}", width, subsequent_indent="     ")
    return "\n".join(lines) + "\n"


def to_markdown(claims: PaperClaims) -> str:
    """GitHub Markdown: a line per claim, and below it where the claim stands and what decides it."""
    audits, measured = counts(claims)
    parts = [f"## Claims: {claims.title} ({claims.paper})", READING, f"Audit: {audits}. Measured: {measured}."]
    lines = ["| claim | audit | measured |", "| --- | --- | --- |"]
    for judged in claims.judged:
        measured_cell = "; ".join(map(_with_evidence, judged.measured))
        cells = [f"{judged.claim.id}. {judged.claim.claim}", _with_evidence(judged.audit), measured_cell]
        lines.append("| " + " | ".join(map(markdown_text, cells)) + " |")
    parts.append("\n".join(lines))
    for judged in claims.judged:
        claim = judged.claim
        decided = [f"`{text}`" for text in (*claim.measured_text, *claim.tests)] or [claim.needs or claim.not_run_yet]
        stands = f"{claim.id} ({markdown_text(claim.where)}). Decided by {'; '.join(decided)}."
        if claim.later:
            stands += f" Chosen after the data: {'; '.join(f'`{text}`' for text in claim.later_text)}."
        if claim.threshold:
            stands += f" Threshold as of revision {claim.threshold}."
        parts.append(f"{stands} {markdown_text(claim.note)}".rstrip())
    return "\n\n".join(parts) + "\n"


def style_of(verdict: Verdict) -> str:
    """The class of a verdict on the page."""
    return {HOLDS: "holds", FAILS: "fails", UNDECIDED: "undecided", ONE_SEED: "undecided"}.get(verdict.verdict, "open")


def _with_evidence(verdict: Verdict) -> str:
    reasons = evidence(verdict)
    return f"{headline(verdict)} ({reasons})" if reasons else headline(verdict)


_PLURAL = {HOLDS: "hold", FAILS: "do not hold", NEEDS: "need what is not here", UNLIKE: "of unlike protocols"}


def _digits(finding: Finding) -> int:
    """Decimals that show the margin, and its interval, with two digits, and no end of it as 0."""
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
