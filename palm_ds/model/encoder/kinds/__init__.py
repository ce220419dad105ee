"""The encoders that come with palm_ds; palm_ds/model/config/encoder_kinds.py has their names."""
