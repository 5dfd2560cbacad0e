"""LayerSkip-style self-speculation: the first layers with the shared head draft, the others
verify.
"""
