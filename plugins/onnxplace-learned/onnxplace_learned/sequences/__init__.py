"""Policies that decide about all groups at once, as a sequence: `hierarchical` (HDP, ColocRL) and `go` (GO, GDP)."""
