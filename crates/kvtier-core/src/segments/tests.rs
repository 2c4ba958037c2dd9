//! Tests of the segment index.
