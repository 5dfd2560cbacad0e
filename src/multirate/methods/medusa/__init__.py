"""Medusa-1: heads on the final residual draft the tokens after the next one."""
