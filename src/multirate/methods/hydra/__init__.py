"""Hydra++: heads that know the tokens drafted before theirs draft the ones after."""
