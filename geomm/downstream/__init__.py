"""Tasks that a pre-trained ALBEF is fine-tuned for: VQA, visual entailment, NLVR2 (GeoMM, Table 3)."""
