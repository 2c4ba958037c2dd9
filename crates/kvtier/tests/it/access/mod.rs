//! Access to the built server: tokens, TLS, secrets, socket files. Scenarios of requests are files, in
//! `tests/rest`.

mod cli;
mod files;
mod ipc;
mod rest;
mod secrets;
mod served;
