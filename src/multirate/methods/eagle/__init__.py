"""EAGLE: a decoder layer that drafts the model's next feature, read by the model's own head."""
