"""The links of this box: measured, and chosen among for KV transfers."""
