"""The page on which a person asks a trained model about images: `fedvlp explore`."""
