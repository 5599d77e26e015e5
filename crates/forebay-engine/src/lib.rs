//! Turns token ids into token ids: planning, sessions, sampling, decode loop.
