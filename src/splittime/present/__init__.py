"""What every command uses to show results: tables that fit the terminal, safe terminal text."""
