from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("seeded")
