"""CALM: a token leaves at the first exit where a confidence passes a threshold that decays."""
