"""Helpers of the placers, one folder for each way to place."""
