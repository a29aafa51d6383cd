"""The command line: verbs, their options, what they print."""
