"""What is measured of a model: retrieval, zero-shot classification, multi-label classification, distortion."""
