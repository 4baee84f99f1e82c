"""Split operators over devices: rules, choice and rewriting."""
