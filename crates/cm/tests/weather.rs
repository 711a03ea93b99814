//! Many connections at once over a network that loses, duplicates and reorders datagrams: both programs get consistent
//! events, each once, and no connection is left at the end.

mod common;

use std::collections::HashMap;

use common::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_cm::*;
use terrace_wire::cm::RejReason;

/// A program's events of one connection.
#[derive(Default, Debug)]
struct Story {
    established: u32,
    refused: u32,
    unreachable: u32,
    disconnected: u32,
    asked: bool,
}

struct Program {
    stories: HashMap<ConnId, Story>,
}

const CONNECTIONS: u32 = 30;

/// Longer than any series of retransmissions without an event.
const SILENCE_NS: u64 = 200 * SECOND_NS;

fn play(seed: u64) {
    let mut dice = StdRng::seed_from_u64(seed);
    let weather = Weather {
        lost: dice.random_range(0..35),
        doubled: dice.random_range(0..35),
        delay_ns: dice.random_range(1..SECOND_NS),
    };
    let mut world = World::new(seed, weather);
    let mut programs = [0, 1].map(|_| Program { stories: HashMap::new() });
    world.ends[1].listen(ListenerId(1), service(), None, 1000).expect("free");
    let mut to_begin = CONNECTIONS;
    let mut heard_at = world.now;
    loop {
        let until = world.now.after_ns(1000 * SECOND_NS);
        let begins = to_begin > 0 && dice.random_bool(0.2);
        if begins {
            let conn = world.ends[0].connect(world.now, to_begin.into(), &connect_from(0, to_begin));
            programs[0].stories.insert(conn.expect("sent"), Story { asked: true, ..Story::default() });
            to_begin -= 1;
        }
        world.step(until);
        for end in 0..2 {
            for event in world.take_heard(end) {
                heard_at = world.now;
                act(&mut world, &mut programs, end, &event, &mut dice);
            }
        }
        // Established connections send keepalives for ever, so the world never becomes idle.
        if to_begin == 0 && !begins && world.now > heard_at.after_ns(SILENCE_NS) {
            break;
        }
    }
    judge(seed, &programs);
    for (end, program) in programs.iter().enumerate() {
        program.stories.keys().for_each(|conn| world.ends[end].destroy(*conn, world.now));
    }
    world.run_for(3000 * SECOND_NS);
    for end in 0..2 {
        assert_eq!(world.ends[end].connection_count(), 0, "seed {seed}, end {end}");
        assert_eq!(world.ends[end].poll_timeout(), None, "seed {seed}, end {end}");
    }
}

fn act(world: &mut World, programs: &mut [Program; 2], end: usize, event: &Event, dice: &mut StdRng) {
    let (now, conn) = (world.now, event.conn);
    let story = programs[end].stories.entry(conn).or_default();
    match &event.kind {
        EventKind::Request { .. } => {
            assert!(!std::mem::replace(&mut story.asked, true), "a request that comes twice");
            world.ends[1].take_request(conn, u64::from(conn.0));
            if dice.random_bool(0.2) {
                world.ends[1].reject(now, conn, RejReason::CONSUMER_DEFINED, &[]).expect("refused");
                story.refused += 1;
            } else {
                world.ends[1].accept(now, conn, &accept_with(conn.0 & 0xff_ffff)).expect("accepted");
            }
        }
        EventKind::Response(_) => {
            world.ends[0].establish(world.now, conn).expect("established");
            story.established += 1;
        }
        EventKind::Established => story.established += 1,
        EventKind::Rejected { .. } => story.refused += 1,
        EventKind::Unreachable => story.unreachable += 1,
        EventKind::Disconnected { .. } => {
            story.disconnected += 1;
            // If the peer sent the DREQ, this answers it.
            let _ = world.ends[end].disconnect(now, conn);
        }
        EventKind::TimeWaitExit => {}
        other => panic!("{other:?}"),
    }
    if programs[end].stories[&conn].established == 1 && dice.random_bool(0.7) {
        let _ = world.ends[end].disconnect(now, conn);
    }
}

fn judge(seed: u64, programs: &[Program; 2]) {
    for (end, program) in programs.iter().enumerate() {
        for (conn, story) in &program.stories {
            let context = format!("seed {seed}, end {end}, {conn:?}: {story:?}");
            assert!(story.established <= 1 && story.disconnected <= 1, "{context}");
            assert!(story.refused + story.unreachable <= 1, "{context}");
            // A DREQ may overtake the RTU, or come instead of it.
            let ends = story.established + story.refused + story.unreachable + story.disconnected;
            assert!(ends >= 1, "{context}");
        }
    }
    assert_eq!(programs[0].stories.len(), CONNECTIONS as usize);
    let ended = |program: &Program| program.stories.values().filter(|story| story.disconnected == 1).count();
    // A disconnected end tells its peer, and retransmissions are enough for this rate of loss.
    let difference = ended(&programs[0]).abs_diff(ended(&programs[1]));
    assert!(difference <= 1, "seed {seed}: {difference}");
}

#[test]
fn both_ends_hear_the_same_story() {
    let seeds = std::env::var("TERRACE_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(300);
    (0..seeds).for_each(play);
}
