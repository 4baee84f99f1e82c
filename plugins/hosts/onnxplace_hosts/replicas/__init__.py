"""Copies of a bundle behind one session: which takes a request, and what happens when one dies."""
