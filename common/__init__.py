"""What the four paper folders share. Imports no paper folder (tests/test_layering.py)."""
