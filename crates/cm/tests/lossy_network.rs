//! Many concurrent connections over a network that loses, duplicates and reorders datagrams: both programs get
//! consistent events, each once, and no connection remains at the end.

mod common;

use std::collections::HashMap;

use common::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_cm::*;
use terrace_wire::cm::RejReason;

/// A program's events of one connection.
#[derive(Default, Debug)]
struct Outcome {
    established: u32,
    refused: u32,
    unreachable: u32,
    disconnected: u32,
    requested: bool,
}

struct Program {
    outcomes: HashMap<ConnId, Outcome>,
}

const CONNECTIONS: u32 = 30;

/// The time is longer than any series of retransmissions without an event.
const SILENCE_NS: u64 = 200 * SECOND_NS;

fn run_seed(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let faults = NetworkFaults {
        lost: rng.random_range(0..35),
        duplicated: rng.random_range(0..35),
        delay_ns: rng.random_range(1..SECOND_NS),
    };
    let mut world = World::new(seed, faults);
    let mut programs = [0, 1].map(|_| Program { outcomes: HashMap::new() });
    world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1000).expect("free");
    let mut to_connect = CONNECTIONS;
    let mut last_event_at = world.now;
    loop {
        let until = world.now.after_ns(1000 * SECOND_NS);
        let connects = to_connect > 0 && rng.random_bool(0.2);
        if connects {
            let conn = world.ends[0].connect(world.now, to_connect.into(), &connect_from(0, to_connect));
            programs[0]
                .outcomes
                .insert(conn.expect("sent"), Outcome { requested: true, ..Outcome::default() });
            to_connect -= 1;
        }
        world.step(until);
        for end in 0..2 {
            for event in world.take_events(end) {
                last_event_at = world.now;
                act(&mut world, &mut programs, end, &event, &mut rng);
            }
        }
        // Established connections send keepalives for ever, so the world is never idle.
        if to_connect == 0 && !connects && world.now > last_event_at.after_ns(SILENCE_NS) {
            break;
        }
    }
    check_outcomes(seed, &programs);
    for (end, program) in programs.iter().enumerate() {
        program.outcomes.keys().for_each(|conn| world.ends[end].destroy(*conn, world.now));
    }
    world.run_for(3000 * SECOND_NS);
    for end in 0..2 {
        assert_eq!(world.ends[end].connection_count(), 0, "seed {seed}, end {end}");
        assert_eq!(world.ends[end].poll_timeout(), None, "seed {seed}, end {end}");
    }
}

fn act(world: &mut World, programs: &mut [Program; 2], end: usize, event: &Event, rng: &mut StdRng) {
    let (now, conn) = (world.now, event.conn);
    let outcome = programs[end].outcomes.entry(conn).or_default();
    match &event.kind {
        EventKind::Request { .. } => {
            assert!(!std::mem::replace(&mut outcome.requested, true), "a request event arrived twice");
            world.ends[1].assign_request(conn, u64::from(conn.0));
            if rng.random_bool(0.2) {
                world.ends[1].reject(now, conn, RejReason::CONSUMER_DEFINED, &[]).expect("refused");
                outcome.refused += 1;
            } else {
                world.ends[1].accept(now, conn, &accept_with(conn.0 & 0xff_ffff)).expect("accepted");
            }
        }
        EventKind::Response(_) => {
            world.ends[0].establish(world.now, conn).expect("established");
            outcome.established += 1;
        }
        EventKind::Established => outcome.established += 1,
        EventKind::Rejected { .. } => outcome.refused += 1,
        EventKind::Unreachable => outcome.unreachable += 1,
        EventKind::Disconnected { .. } => {
            outcome.disconnected += 1;
            // If the peer sent the DREQ, the call answers it.
            let _ = world.ends[end].disconnect(now, conn);
        }
        EventKind::TimeWaitExit => {}
        other => panic!("{other:?}"),
    }
    if programs[end].outcomes[&conn].established == 1 && rng.random_bool(0.7) {
        let _ = world.ends[end].disconnect(now, conn);
    }
}

fn check_outcomes(seed: u64, programs: &[Program; 2]) {
    for (end, program) in programs.iter().enumerate() {
        for (conn, outcome) in &program.outcomes {
            let context = format!("seed {seed}, end {end}, {conn:?}: {outcome:?}");
            assert!(outcome.established <= 1 && outcome.disconnected <= 1, "{context}");
            assert!(outcome.refused + outcome.unreachable <= 1, "{context}");
            // A DREQ may overtake the RTU, or come instead of it.
            let ends = outcome.established + outcome.refused + outcome.unreachable + outcome.disconnected;
            assert!(ends >= 1, "{context}");
        }
    }
    assert_eq!(programs[0].outcomes.len(), CONNECTIONS as usize);
    let ended =
        |program: &Program| program.outcomes.values().filter(|outcome| outcome.disconnected == 1).count();
    // A disconnected end sends its peer a DREQ, and the retransmissions suffice at this loss rate.
    let difference = ended(&programs[0]).abs_diff(ended(&programs[1]));
    assert!(difference <= 1, "seed {seed}: {difference}");
}

#[test]
fn both_ends_get_consistent_events() {
    let seeds = std::env::var("TERRACE_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(300);
    (0..seeds).for_each(run_seed);
}
