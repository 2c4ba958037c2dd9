//! The cache server: engine, ZMQ front end, HTTP admin, metrics and configuration.
