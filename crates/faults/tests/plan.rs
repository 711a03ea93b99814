//! Valid plans, and the errors for mistakes in a plan.

use terrace_faults::FaultPlan;

#[test]
fn a_plan_may_leave_out_every_key() {
    assert_eq!(FaultPlan::parse("").unwrap(), FaultPlan::default());
    let plan = FaultPlan::parse("seed = 7\nloss = 0.25\ndelay_us_max = 40\n").unwrap();
    assert_eq!((plan.seed, plan.loss, plan.delay_us_max), (7, 0.25, 40));
}

fn error_of(text: &str) -> String {
    let error_of = FaultPlan::parse(text).expect_err(text).to_string();
    assert_eq!(error_of.lines().count(), 1, "{error_of}");
    error_of
}

#[test]
fn mistakes_in_a_plan_are_named() {
    for (text, words) in [
        ("los = 0.1", "los"),
        ("loss = 1.5", "`loss` is 1.5"),
        ("corrupt = -0.1", "`corrupt` is -0.1"),
        ("duplicate = nan", "`duplicate` is NaN"),
        ("seed = 1\nloss = \"much\"", "line 2 (`loss = \"much\"`)"),
        ("delay_us_min = 5", "`delay_us_min` (5) is above"),
        ("delay_us_max = 99000000", "`delay_us_max`"),
        ("reorder_us_max = 99000000", "`reorder_us_max`"),
        ("loss = ", "line 1"),
        ("fault = 3", "line 1"),
        ("rules = []", "rules"),
    ] {
        let message = error_of(text);
        assert!(message.contains(words), "{text}: {message}");
    }
    assert!(error_of(&"[[fault]]\nkind = \"loss\"\n".repeat(101)).contains("at most 100"));
}

#[test]
fn an_unreadable_plan_is_named() {
    let error = FaultPlan::load("/nonexistent/plan.toml".as_ref()).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/plan.toml"), "{error}");
}

#[test]
fn mistakes_in_a_fault_are_named() {
    for (text, words) in [
        ("", "kind"),
        ("kind = \"los\"", "unknown variant `los`, expected one of `loss`"),
        ("kind = \"loss\"\nafter = 3", "unknown field `after`"),
        ("kind = \"loss\"\nprobability = 2.0", "fault 1 (kind = \"loss\"): `probability` is 2"),
        ("kind = \"loss\"\npeer = \"nobody\"", "peer"),
        ("kind = \"loss\"\ndirection = \"up\"", "expected one of `out`, `in`, `both`"),
        (
            "kind = \"blackhole\"\nprobability = 0.5",
            "`probability` is no key of this kind; it has direction, peer",
        ),
        ("kind = \"delay\"\ndelay_us_max = 1\ndirection = \"in\"", "give the peer such a plan"),
        ("kind = \"delay\"", "the fault needs `delay_us_min`, `delay_us_max` or both"),
        ("kind = \"delay\"\ndelay_us_min = 9\ndelay_us_max = 5", "`delay_us_min` (9) is above"),
        ("kind = \"delay\"\ndelay_us_max = 60000001", "choose 1 to 60000000"),
        ("kind = \"delay\"\ndelay_us_max = 0", "choose 1 to"),
        ("kind = \"reorder\"\nreorder_us_max = 0", "choose 1 to"),
        ("kind = \"rnr\"\nafter_packets = 3", "`after_packets` is no key of this kind"),
        ("kind = \"loss\"\nfor_operations = 3", "`for_operations` is no key of this kind"),
        ("kind = \"loss\"\nafter_ms = 3\nafter_packets = 3", "exclude each other"),
        ("kind = \"loss\"\nfor_ms = 3\nfor_packets = 3", "exclude each other"),
        ("kind = \"loss\"\nfor_ms = 0", "`for_ms` is 0; choose 1 to"),
        ("kind = \"loss\"\nfor_packets = 0", "remove the fault"),
        ("kind = \"loss\"\nafter_ms = -1", "line 3"),
        ("kind = \"loss\"\nafter_ms = 604800001", "choose 0 to 604800000"),
        ("kind = \"loss\"\nevery_ms = 5", "add `for_ms`"),
        ("kind = \"loss\"\nfor_ms = 5\nevery_ms = 5", "`for_ms` (5) must be below `every_ms` (5)"),
        ("kind = \"slow-storage\"", "the fault needs `delay_us_min`"),
        ("kind = \"slow-storage\"\ndelay_us_min = 1\nerror = \"io\"", "`error` is no key of this kind"),
        ("kind = \"slow-storage\"\ndelay_us_min = 1\npeer = \"::1\"", "`peer` is no key of this kind"),
        ("kind = \"failing-storage\"\nerror = \"EIO\"", "expected `io` or `no-space`"),
        (
            "kind = \"failing-storage\"\nerror = \"no-space\"\noperation = \"read\"",
            "only writes run out of space",
        ),
        ("kind = \"failing-storage\"\noperation = \"seek\"", "unknown variant `seek`"),
    ] {
        let message = error_of(&format!("[[fault]]\n{text}"));
        assert!(message.contains(words), "{text}: {message}");
    }
    let second = "[[fault]]\nkind = \"rnr\"\n[[fault]]\nkind = \"rnr\"\nprobability = -1.0";
    assert!(error_of(second).contains("fault 2"), "{}", error_of(second));
}

#[test]
fn a_plan_reports_its_packet_and_storage_faults() {
    let kinds_of_faults = |text: &str| {
        let plan = FaultPlan::parse(text).unwrap();
        (plan.has_packet_faults(), plan.has_storage_faults())
    };
    assert_eq!(kinds_of_faults("seed = 1"), (false, false));
    assert_eq!(kinds_of_faults("corrupt = 0.1"), (true, false));
    assert_eq!(kinds_of_faults("delay_us_max = 1"), (true, false));
    assert_eq!(kinds_of_faults("[[fault]]\nkind = \"blackhole\""), (true, false));
    assert_eq!(kinds_of_faults("[[fault]]\nkind = \"failing-storage\""), (false, true));
}
