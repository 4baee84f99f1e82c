"""What an operator may do: which axes of its values are split together, and how its node then changes."""
