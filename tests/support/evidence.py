"""The tests that show what the hospitals' pages say: a page of the site (docs/hooks.py), which has them as sentences.

Guards and attacks are those of docs/security.md, parties those of provisioning/PRIVACY.md, by their names there.
"""

from __future__ import annotations

GUARDS = """
Network:
    flare/test_provisioned.py test_a_site_of_another_root_cannot_join
Messages at a site:
    flare/test_perimeter.py
    flare/test_tracking.py test_a_site_fires_no_event_at_the_server_but_its_figures
    deploy/test_site_doctor.py
Jobs run as another account:
    flare/test_job_user.py test_a_site_trains_whose_flare_process_may_not_read_the_data test_nothing_else_is_started
    deploy/test_containers.py test_jobs_alone_read_the_data_and_as_a_user_of_their_own
    deploy/test_site_doctor.py test_the_doctor_looks_whether_flares_account_may_read_the_data
Roles:
    deploy/test_provisioning.py test_who_may_do_what
    flare/test_provisioned.py test_a_member_may_not_submit
No code in a job:
    flare/test_provisioned.py test_a_site_refuses_a_job_with_custom_code
Classes by name:
    flare/test_class_list.py test_a_hostile_job_is_refused_before_it_starts_with_an_audit_line
        test_the_shipped_list_is_what_the_jobs_need
    flare/test_job_check.py test_the_files_of_a_job
    flare/test_provisioned.py test_a_site_refuses_a_class_that_is_not_on_its_list
        test_the_server_refuses_a_class_that_is_not_on_its_list
Classes once more:
    flare/test_class_list.py test_a_hostile_job_is_refused_before_it_starts_with_an_audit_line
        test_an_honest_job_passes_both
Data sets by name:
    deploy/test_site_config.py test_a_provisioned_site_opens_no_path_that_a_job_brings
        test_no_path_leads_out_of_the_sites_root
Public sets:
    deploy/test_named_data.py test_a_site_lends_no_data_set_that_it_does_not_list_as_public
    deploy/test_site_doctor.py test_the_doctor_names_the_data_sets_that_are_listed_as_public
Names of runs:
    run/test_simulate.py test_a_name_that_could_lead_out_of_the_runs_is_none
    flare/test_paths.py test_a_name_that_is_no_run_of_this_site_is_refused_and_not_repeated
    faults/test_hostile_settings.py test_row_28_the_servers_name_for_a_run_opens_no_other_folder
Towers by name:
    deploy/test_site_config.py test_a_job_names_towers_and_no_path_of_the_site
    flare/test_controller.py test_a_job_gives_a_provisioned_server_no_path_to_a_tower
Initial weights by checksum:
    deploy/test_site_config.py test_a_job_names_weights_to_start_from_and_no_path_of_the_site
        test_weights_of_the_sites_own_are_called_by_their_name_and_checksum
    models/test_initial.py test_what_does_not_fit_is_refused_and_the_model_stays
    flare/test_controller.py test_a_job_whose_weights_have_no_checksum_is_refused_before_a_file_is_opened
Envelope:
    deploy/test_envelope.py test_no_update_of_a_few_records_leaves_the_site
        test_no_figure_of_a_few_records_leaves_the_site test_an_engineer_accepts_one_experiment
        test_the_filter_holds_back_what_is_too_little_or_was_never_counted
        test_a_committed_job_keeps_to_the_default_limits
    flare/test_provisioned.py test_a_site_sends_no_update_of_two_records
Presets and settings:
    deploy/test_envelope.py test_a_preset_runs_on_its_own_data_or_on_the_sites
        test_no_job_with_a_number_that_no_honest_job_has_runs
Records shown:
    deploy/test_envelope.py test_a_method_that_shows_single_records_runs_only_where_its_experiment_was_accepted
        test_no_film_leaves_where_nobody_accepted_that
        test_the_engineer_is_told_what_an_experiment_shows_before_it_is_accepted
    faults/test_red_team.py test_no_experiment_shows_single_records
Figures by data set:
    deploy/test_envelope.py test_a_site_measures_only_what_its_engineer_names
        test_the_filter_holds_back_figures_that_nobody_may_measure_here test_both_classes_of_a_finding_are_counted
        test_the_filter_holds_back_a_figure_of_a_few_with_a_finding
One experiment, one version:
    flare/test_executor.py test_the_task_of_another_experiment_or_version_is_refused
Updates:
    faults/test_updates.py
    faults/test_red_team.py test_no_site_hurts_the_run
Tasks:
    core/test_gate.py test_a_task_of_no_form_is_refused
    faults/test_red_team.py test_no_server_hurts_a_site
Guards are needed:
    faults/test_red_team.py test_without_a_guard_a_job_gets_through
        test_without_a_guard_an_experiment_tells_of_few_records test_without_a_guard_an_update_gets_through
        test_without_a_guard_a_task_gets_through
What leaves:
    flare/test_privacy_filters.py test_whatever_is_no_update_is_refused
        test_what_rides_beside_an_update_or_on_a_failure_stays
Crafted models:
    core/test_crafted.py test_every_construction_is_refused_and_named
    flare/test_crafted_model.py test_it_is_refused_before_anything_is_trained
Attacks before sending:
    deploy/test_envelope.py test_an_update_that_gives_records_away_does_not_leave
        test_an_honest_update_leaves_as_it_was_trained test_what_cannot_be_measured_does_not_leave
    flare/test_privacy_filters.py test_an_update_from_which_words_can_be_read_does_not_leave
Shared noise:
    flare/test_noise_shares.py test_the_sum_has_the_noise_that_is_booked_whoever_drops_out
        test_a_site_counts_on_no_shares_that_a_round_may_lack
    flare/test_encryption.py test_a_sum_of_fewer_updates_than_the_quorum_is_none
        test_an_update_of_no_records_is_none_of_the_quorum
    deploy/test_envelope.py test_a_job_that_needs_too_few_sites_is_refused
Word embedding:
    flare/test_policies.py test_the_shipped_policy_sends_the_words_as_they_came
    deploy/test_envelope.py test_the_words_of_an_update_stay_where_the_site_wants_that
Digits of figures:
    flare/test_noise_shares.py test_beside_the_shared_noise_no_figure_of_the_records_leaves
    deploy/test_provisioning.py test_what_figures_leave_under_each_policy
    flare/test_privacy_filters.py test_a_figure_leaves_with_as_many_digits_as_the_site_says
    flare/test_provisioned.py test_every_site_adds_noise_tells_epsilon_and_stops_at_its_budget
Errors:
    core/test_site_error.py test_no_other_text_leaves
        test_public_words_are_literals_so_that_nothing_can_be_put_into_them
    flare/test_messages.py test_only_public_words_leave_a_site test_the_server_repeats_nothing_but_one_plain_line
    flare/test_privacy_filters.py test_no_path_of_the_site_leaves_in_an_error
    deploy/test_provisioning.py test_nothing_streams_to_the_server_and_no_store_is_shared
Record ids:
    data/test_record_ids.py test_no_record_number_is_found_in_what_a_run_leaves
        test_two_sites_give_one_record_two_hashes test_two_processes_of_one_site_agree
        test_the_key_is_its_owners_alone_from_its_first_byte_on
Pages:
    report/test_records.py test_patients_are_in_no_page_that_nobody_asked_for
    report/test_classifier.py test_patients_of_a_public_set_are_in_no_page_that_nobody_asked_for
    report/test_data_page.py test_nothing_of_a_patient_and_nothing_from_outside
Explore:
    report/explore/test_serve.py test_another_name_that_leads_here_is_refused test_another_sites_page_may_not_ask
        test_the_folder_of_uploads_is_its_owners_and_goes
    report/explore/test_page.py test_a_dropped_film_leaves_no_file
    report/explore/test_browser.py test_a_person_uses_every_tab
    cli/test_explore.py test_another_address_is_a_caution
Planted identifiers:
    flare/test_smoke.py test_nobody_is_named_in_any_file_or_byte_sent
Noise:
    flare/test_privacy_filters.py test_at_the_budget_nothing_leaves_in_whatever_job
    flare/test_privacy_budget.py test_a_damaged_file_stops_everything
Privacy ledger:
    flare/test_privacy_budget.py test_a_ledger_that_is_gone_is_no_empty_book
        test_a_ledger_that_was_cut_or_is_an_older_copy_is_refused test_another_sites_ledger_is_refused
Encryption:
    flare/test_encryption.py test_the_server_cannot_read_what_it_adds
Encrypted updates:
    flare/test_encryption.py test_a_bad_ciphertext_costs_its_site_the_round_and_not_the_run
        test_a_change_beyond_the_sites_own_limits_is_not_encrypted
        test_what_only_the_key_can_see_is_seen_at_the_honest_sites
        test_too_many_records_for_the_parameters_are_refused_before_a_round_is_trained
Plugins:
    run/test_plugins.py test_a_configuration_imports_nothing_that_nobody_named
        test_other_content_is_refused_with_the_remedy
One writer:
    run/test_lock.py test_of_two_resumes_at_once_one_wins_and_the_bytes_are_the_same
        test_the_second_is_told_who_and_since_when_and_a_killed_one_bars_nobody
    flare/test_controller.py test_a_second_job_of_the_same_run_is_told_who_is_at_it_and_changes_nothing
No pickles:
    core/test_checkpoint.py test_a_pickle_is_refused_and_never_run
    test_architecture.py test_nothing_is_unpickled
Poisoned updates:
    faults/test_updates.py test_row_11_what_one_finite_site_can_do_is_its_share
    faults/test_poison.py test_by_default_it_goes_no_further_than_five_of_an_honest_sites_steps
Robust means:
    core/test_robust_mean.py test_one_site_of_four_cannot_leave_the_range_of_the_others
    faults/test_poison.py test_a_robust_average_lies_between_honest_values
Counts of samples:
    faults/test_updates.py test_row_7_a_count_is_pinned_by_the_first_reply test_row_7_no_site_has_more_than_its_share
Rollback:
    run/test_rollback.py test_a_poisoned_round_is_undone_by_one_command
        test_every_method_goes_on_from_a_kept_checkpoint
    flare/test_controller.py test_a_run_that_was_put_back_is_gone_on_with_by_the_same_job
Locked packages:
    test_supply_chain.py test_every_file_that_may_be_installed_has_a_hash
        test_all_that_is_installed_is_in_the_lock test_an_altered_file_is_not_installed
        test_make_installs_nothing_without_a_hash test_every_range_ends_somewhere
    deploy/test_containers.py test_the_image_asks_one_index_and_takes_what_the_lock_names
Signed software:
    deploy/test_site_doctor.py test_software_that_the_consortium_did_not_sign_fails
        test_the_guides_own_commands_find_what_was_altered test_another_fedvlp_than_the_kits_fails
        test_without_a_release_nothing_is_provisioned
Release:
    test_supply_chain.py test_a_release_is_the_code_its_lock_and_a_list_of_both
Private keys:
    deploy/test_site_doctor.py test_no_key_is_ever_readable_for_others test_no_other_key_of_the_kit_is_open
Base image:
    deploy/test_containers.py test_the_base_is_taken_by_its_digest_alone
Containers:
    deploy/test_containers.py test_a_process_at_a_site_reaches_the_servers_port_and_nothing_else
        test_a_sites_only_way_out_is_the_gate test_no_container_has_rights_or_writes_into_its_image
        test_jobs_alone_read_the_data_and_as_a_user_of_their_own
"""

ATTACKS = """
S1, a job whose executor runs a command of its own. It did: it read a site's private key and a report, and copied them:
    flare/test_provisioned.py test_a_site_refuses_a_class_that_is_not_on_its_list
    flare/test_class_list.py test_a_hostile_job_is_refused_before_it_starts_with_an_audit_line
S2, a function in the place of a component. It did: the privacy ledger was moved or overwritten: the budget began anew:
    flare/test_class_list.py test_a_hostile_job_is_refused_before_it_starts_with_an_audit_line
    flare/test_privacy_budget.py test_a_ledger_that_is_gone_is_no_empty_book
S3, one step on two records without weight decay. It did: 59 rows of the word embedding showed the words of reports:
    flare/test_provisioned.py test_a_site_sends_no_update_of_two_records
    faults/test_red_team.py test_no_experiment_tells_of_few_records
    deploy/test_envelope.py test_a_huge_learning_rate_does_not_hide_the_first_batch_among_many
        test_next_to_no_noise_does_not_hide_the_first_batch_either
S4, `dro_batch=2`, `dro_fraction=1e-9`. It did: the exact loss on two records of each site reached the server:
    deploy/test_envelope.py test_no_figure_of_a_few_records_leaves_the_site
    faults/test_red_team.py test_no_experiment_tells_of_few_records
S5, a tensor as the round; a name of 120 MB; a million metrics. It did: the run ended, or saved no checkpoint:
    faults/test_red_team.py test_no_site_hurts_the_run test_without_a_guard_an_update_gets_through
    core/test_gate.py test_refused
    core/test_aggregation.py test_what_no_file_holds_waits_in_memory_for_the_gate
    faults/test_wire.py test_a_value_that_is_no_tensor_costs_its_site_alone_where_another_is_asked_again
S6, ciphertexts of zeros, noise, flipped bytes; values times 10,000. It did: the run ended; weights grew 7,600 times:
    flare/test_encryption.py test_a_bad_ciphertext_costs_its_site_the_round_and_not_the_run
        test_a_change_beyond_the_sites_own_limits_is_not_encrypted
        test_what_only_the_key_can_see_is_seen_at_the_honest_sites
S7, finite weights of 3e38 from one site. It did: every site answered NaN, and the only checkpoint held that mean:
    faults/test_poison.py test_by_default_it_goes_no_further_than_five_of_an_honest_sites_steps
    run/test_rollback.py test_a_poisoned_round_is_undone_by_one_command
    methods/test_pms_fm.py test_one_huge_gradient_does_not_stop_the_selector_for_good
    methods/test_fedfed.py test_pairs_that_would_spoil_the_pool_are_dropped_and_named
S8, one of five sites of 300 records claims 10,000,000. It did: the mean was its update to 99.99 %:
    faults/test_updates.py test_row_7_a_count_is_pinned_by_the_first_reply test_row_7_no_site_has_more_than_its_share
S9, a run named by an absolute path. It did: the server wrote there:
    run/test_simulate.py test_a_name_that_could_lead_out_of_the_runs_is_none
    faults/test_red_team.py test_without_a_guard_a_job_gets_through
S10, a damaged memory at a site. It did: the error told the site's folder:
    core/test_site_error.py test_no_other_text_leaves
    flare/test_privacy_filters.py test_no_path_of_the_site_leaves_in_an_error
    flare/test_job_check.py test_a_job_cannot_have_the_lines_of_a_sites_log_sent_as_events
S11, two processes resume one run. It did: both began:
    run/test_lock.py test_of_two_resumes_at_once_one_wins_and_the_bytes_are_the_same
S12, the hash of a record's id. It did: a record number below 10,000,000 was found in 19 seconds:
    data/test_record_ids.py test_no_record_number_is_found_in_what_a_run_leaves
S14, what the kit is built from. It did: no hashes, two indexes, the base image by tag:
    test_supply_chain.py test_every_file_that_may_be_installed_has_a_hash test_an_altered_file_is_not_installed
    deploy/test_software.py test_nobody_elses_signature_is_taken
    deploy/test_site_doctor.py test_no_other_key_of_the_kit_is_open
"""

PARTIES = """
the lead, can learn:
    flare/test_privacy_filters.py test_a_figure_leaves_with_as_many_digits_as_the_site_says
    core/test_site_error.py test_no_other_text_leaves
    flare/test_provisioned.py test_the_lead_submits_monitors_and_takes_the_model_home
the lead, cannot:
    flare/test_provisioned.py test_a_site_refuses_a_class_that_is_not_on_its_list
        test_a_site_refuses_a_job_with_custom_code test_a_site_sends_no_update_of_two_records
    deploy/test_envelope.py test_no_figure_of_a_few_records_leaves_the_site
        test_a_site_measures_only_what_its_engineer_names
    faults/test_red_team.py test_no_experiment_tells_of_few_records
    deploy/test_site_config.py test_a_provisioned_site_opens_no_path_that_a_job_brings
        test_a_job_names_towers_and_no_path_of_the_site
    core/test_site_error.py test_no_other_text_leaves
    data/test_record_ids.py test_no_record_number_is_found_in_what_a_run_leaves
    flare/test_privacy_filters.py test_at_the_budget_nothing_leaves_in_whatever_job
    flare/test_privacy_budget.py test_a_ledger_that_is_gone_is_no_empty_book
the server's operator, can learn:
    flare/test_policies.py test_the_shipped_policy_sends_the_words_as_they_came
    flare/test_provisioned.py test_every_site_adds_noise_tells_epsilon_and_stops_at_its_budget
        test_encrypted_sites_keep_the_plain_model_and_the_server_has_none
the server's operator, cannot:
    flare/test_privacy_filters.py test_noise_is_added_to_the_clipped_change_and_epsilon_is_told
    flare/test_encryption.py test_the_server_cannot_read_what_it_adds
    flare/test_paths.py test_a_name_that_is_no_run_of_this_site_is_refused_and_not_repeated
    faults/test_red_team.py test_no_server_hurts_a_site
another site, can learn:
    faults/test_what_a_site_learns.py test_of_two_sites_each_can_tell_the_others_update
another site, cannot:
    faults/test_what_a_site_learns.py test_no_site_is_sent_what_another_site_sent
    faults/test_updates.py test_every_method_drops_it
    faults/test_poison.py test_by_default_it_goes_no_further_than_five_of_an_honest_sites_steps
    flare/test_encryption.py test_a_bad_ciphertext_costs_its_site_the_round_and_not_the_run
        test_what_only_the_key_can_see_is_seen_at_the_honest_sites
    faults/test_red_team.py test_no_site_hurts_the_run
somebody without an account, can learn:
    flare/test_provisioned.py test_a_site_of_another_root_cannot_join
somebody without an account, cannot:
    flare/test_provisioned.py test_a_member_may_not_submit
    flare/test_smoke.py test_nobody_is_named_in_any_file_or_byte_sent
"""

OPENING = """# Evidence

The tests that show each statement of [security](security.md) and [PRIVACY](../provisioning/PRIVACY.md): a file below
`tests/`, and what its tests are called.
"""


def shown_by(text: str) -> dict[str, dict[str, list[str]]]:
    """Statement -> file below tests/ -> names of its tests; none: the whole file."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in text.split("\n"):
        if line.endswith(":"):
            files = found.setdefault(line[:-1], {})
        for word in line.split() if line.startswith(" ") else ():
            if word.endswith(".py"):
                names = files.setdefault(word, [])
            else:
                names.append(word)
    return found


def table(title: str, text: str) -> str:
    """A section of the page."""
    rows = (
        f"| {statement} | {'; '.join(map(in_words, files, files.values()))} |\n"
        for statement, files in shown_by(text).items()
    )
    return f"## {title}\n\n| | shown by |\n|---|---|\n{''.join(rows)}"


def in_words(file: str, names: list[str]) -> str:
    """A file and its tests, named as sentences."""
    said = [name.removeprefix("test_").replace("_", " ") for name in names]
    return f"`{file}`: {', '.join(said) or 'all'}"


def content() -> str:
    """The page."""
    sections = {"Guards": GUARDS, "Attacks that were run": ATTACKS, "Who can learn what": PARTIES}
    return "\n".join([OPENING, *(table(title, text) for title, text in sections.items())])
