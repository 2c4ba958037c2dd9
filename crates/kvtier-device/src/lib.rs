//! Where an engine's KV pages are: the Device trait, the CPU backend and the copy planner.
