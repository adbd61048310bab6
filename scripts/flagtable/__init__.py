"""Tables of vLLM's flags and variables by release; `scripts/build_flags.py` is the command.

`packages` fetches the releases, `sources` resolves names in them, `arguments` and `variables` read one release, `runs`
puts the releases together and writes YAML.
"""
