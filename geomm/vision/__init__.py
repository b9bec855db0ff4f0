"""GeoMM on pictures alone: MoCo v2 and SwAV (Table 5)."""
