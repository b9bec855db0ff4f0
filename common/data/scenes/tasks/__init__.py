"""Annotations on top of scenes: grounding, questions, statements on pairs, entailment, associations."""
