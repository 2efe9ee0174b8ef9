"""Programs that keep a server under pressure for minutes: clients of all kinds, hostile ones, and too many."""
