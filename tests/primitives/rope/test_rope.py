CASES = {"apply_rope": []}
