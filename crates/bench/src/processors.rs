//! The processors of servers and clients. Each end has its own, so that neither is moved to the other's in the middle of a
//! measurement.

use std::fmt;
use std::fs;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Which processors servers and clients run on. A server's I/O threads run on the server's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors {
    all: Vec<usize>,
    /// How many of them are the server's; 0 if there is one for both.
    server_count: usize,
}

impl Processors {
    /// Divides the processors that this process may use: the first half is the server's. Nothing is pinned if there is
    /// only one.
    pub fn divide() -> Processors {
        let allowed = sched_getaffinity(None).unwrap_or_default();
        Processors::of((0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect())
    }

    fn of(all: Vec<usize>) -> Processors {
        Processors { server_count: all.len() / 2, all }
    }

    /// Whether each end has its own.
    pub fn is_divided(&self) -> bool {
        self.server_count > 0
    }

    /// The server's, as `taskset --cpu-list` takes them.
    pub fn server(&self) -> String {
        list(if self.is_divided() { &self.all[..self.server_count] } else { &self.all })
    }

    /// The clients'.
    fn clients(&self) -> &[usize] {
        &self.all[self.server_count..]
    }

    /// All of them.
    pub fn all(&self) -> String {
        list(&self.all)
    }

    /// Their number.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Moves this thread, and all threads that it starts from now on, to the clients' processors.
    pub fn move_to_clients(&self) {
        let mut set = CpuSet::new();
        self.clients().iter().for_each(|processor| set.set(*processor));
        // They are a part of the allowed ones. If that has just changed, the results say so by their noise.
        let _ = sched_setaffinity(None, &set);
    }
}

impl fmt::Display for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_divided() {
            true => write!(
                f,
                "server and its IO threads on processor {}, clients on processor {}",
                self.server(),
                list(self.clients())
            ),
            false => write!(f, "server and clients on one processor"),
        }
    }
}

fn list(processors: &[usize]) -> String {
    processors.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The processor time that the living threads of a process have used. `None` if the process has ended or the kernel does
/// not count it.
pub fn processor_time(pid: u32) -> Option<Duration> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    // A thread may end meanwhile: its time is lost, as is that of threads that ended before.
    let times = threads.filter_map(|thread| {
        let schedule = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        schedule.split_whitespace().next()?.parse::<u64>().ok()
    });
    let nanoseconds: u64 = times.sum();
    (nanoseconds > 0).then(|| Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_half_of_the_processors() {
        let two = Processors::of(vec![0, 1]);
        assert_eq!(two.to_string(), "server and its IO threads on processor 0, clients on processor 1");
        assert_eq!((two.server(), two.all(), two.count()), ("0".into(), "0,1".into(), 2));
        let five = Processors::of(vec![2, 3, 5, 7, 8]);
        assert_eq!((five.server(), list(five.clients())), ("2,3".into(), "5,7,8".into()));
        let one = Processors::of(vec![4]);
        assert_eq!((one.is_divided(), one.server(), list(one.clients())), (false, "4".into(), "4".into()));
        assert_eq!(one.to_string(), "server and clients on one processor");
    }

    #[test]
    fn the_time_of_this_process_grows_with_its_work() {
        let before = processor_time(std::process::id()).unwrap();
        let mut sum = 0_u64;
        while processor_time(std::process::id()).unwrap() < before + Duration::from_millis(5) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(sum > 0);
        assert_eq!(processor_time(u32::MAX), None);
    }
}
