"""`specinfer tune`: a run of collective boost-tuning, from prompts to drafters and a report."""
