"""What an attacker learns of the records from a trained model, or from what leaves a site: `fedvlp audit`."""
