"""The `kvarto` command: one thin file per subcommand."""
