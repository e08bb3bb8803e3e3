"""Options, settings, limits and the plan: what will run, decided before anything is loaded."""
