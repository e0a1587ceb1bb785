"""An analysis as text."""

from __future__ import annotations

from nereid_parsers.template.analysis import TemplateAnalysis


def as_text(analysis: TemplateAnalysis) -> str:
    """Findings, format, proofs, and what was not decided."""
    lines = [f"{one.name}: {one.finding}" for one in analysis.comparisons]
    lines.append(f"format: {analysis.format}")
    for proof in analysis.proofs:
        state = "read back" if not proof.differs else f"differs in {', '.join(proof.differs)}"
        lines.append(f"proof, {proof.name}: {state}")
    lines += [f"undecided: {one}" for one in analysis.undecided]
    return "\n".join(lines)
