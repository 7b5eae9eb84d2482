"""Attacks on what sites send, beyond membership: `fedvlp attack`, in a clone alone."""
