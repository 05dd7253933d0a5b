"""The database: probes, studies, answers and traces."""
