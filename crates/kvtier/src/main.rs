//! The kvtier command line.
fn main() {}
