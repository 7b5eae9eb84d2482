"""The laboratory: what the papers claim and print, measured again, and what fedvlp costs. No part of the wheel."""
