"""What is measured of a model: retrieval, zero-shot, classification, and what re-training costs."""
