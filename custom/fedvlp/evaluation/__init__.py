"""What is measured of a model: retrieval, zero-shot, classification, linear probes, segmentation."""
