"""GeoMM on images only: MoCo v2 and SwAV (Table 5)."""
