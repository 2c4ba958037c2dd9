//! The LMCache MP protocol from the client's side.
