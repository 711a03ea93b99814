//! The part of remote paging that is in the paged program: a library for `LD_PRELOAD` (`terrace run --remote-memory`).
//!
//! | module | what it knows |
//! |---|---|
//! | `join` | joining the pager when the program starts, and in children |
//! | `evictor` | the thread that moves pages away when the pager asks for it |
//! | `end` | the end of a process whose pager has ended |
//! | `interpose` | functions that give the program memory: what they give is registered for faults |
//! | `output` | lines for the user |
//! | `next` | the functions of the next library of the same names |
//!
//! The pager is a process of its own (`terrace_pager`). Without the environment variable `TERRACE_PAGER` this library does
//! nothing.

mod end;
mod evictor;
mod interpose;
mod join;
mod next;
mod output;
