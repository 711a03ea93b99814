//! An object that is destroyed while others begin and end to refer to it: nothing refers to an object that has ended,
//! and an object ends once.
//!
//! Mutations that this has found: `add` that checks and counts in two steps; `end` that checks and ends in two steps;
//! `add_to_all` that leaves users behind.

use loom::sync::Arc;
use loom::thread;

use crate::sync::model;
use crate::use_count::UseCount;

#[test]
fn nothing_refers_to_an_object_that_has_ended() {
    model(4, || {
        let count = Arc::new(UseCount::default());
        let user = {
            let count = count.clone();
            thread::spawn(move || count.add().is_ok())
        };
        let is_ended = count.end().is_ok();
        let is_used = user.join().unwrap();
        assert!(is_ended != is_used, "ended: {is_ended}, used: {is_used}");
        if is_used {
            count.remove();
            assert!(count.end().is_ok());
        }
        assert!(count.add().is_err() && count.end().is_err() && count.check().is_err());
    });
}

#[test]
fn one_of_two_ends_an_object() {
    model(4, || {
        let count = Arc::new(UseCount::default());
        count.add().expect("it lives");
        let other = {
            let count = count.clone();
            thread::spawn(move || {
                count.remove();
                count.end().is_ok()
            })
        };
        let is_ended_here = count.end().is_ok();
        assert!(!(other.join().unwrap() && is_ended_here), "ended twice");
        assert!(count.end().is_err() && count.check().is_err());
    });
}

#[test]
fn an_object_refers_to_all_or_to_none() {
    model(3, || {
        let counts = Arc::new([UseCount::default(), UseCount::default()]);
        let user = {
            let counts = counts.clone();
            thread::spawn(move || UseCount::add_to_all(counts.iter()).is_ok())
        };
        let is_ended = counts[1].end().is_ok();
        assert!(is_ended != user.join().unwrap());
        assert_eq!(counts[0].end().is_ok(), is_ended, "it is used by nothing, or by what was refused");
    });
}
