"""Sharding rules by families of operators; `table` lists all of them."""
