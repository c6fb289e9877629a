"""What calls do, as seen from outside: activity, snapshots, statistics, spans."""
