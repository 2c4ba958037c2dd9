//! A second process whose pages are on a GPU, over the fake CUDA driver.

mod death;
mod registration;
mod restart;
mod setup;
mod status;
mod stopping;
