"""The tests that show what the hospitals' pages say: a page of the site (docs/hooks.py), which has them as sentences.

Guards and attacks are those of docs/security.md, parties those of provisioning/DATA_FLOW.md, by their names there.
"""

from __future__ import annotations

GUARDS = """
Network:
    flare/test_provisioned.py test_a_site_of_another_root_cannot_join
Messages at a site:
    faults/test_every_message.py
    flare/test_perimeter.py
    flare/test_tracking.py test_a_site_fires_no_event_at_the_server_but_its_figures
    deploy/test_site_doctor.py
Ports inside a machine:
    flare/test_inner_port.py
    flare/test_perimeter.py test_no_other_account_of_the_machine_speaks_to_flares_processes
        test_flare_does_not_start_where_anybody_could_speak_for_its_jobs
    deploy/test_site_doctor.py test_every_kit_is_provisioned_with_the_perimeter
Jobs run as another account:
    flare/test_job_user.py test_a_site_trains_whose_flare_process_may_not_read_the_data
        test_a_request_with_anything_else_starts_nothing
    deploy/test_containers.py test_jobs_alone_read_the_data_and_as_a_user_of_their_own
    deploy/test_site_doctor.py test_the_doctor_looks_whether_flares_account_may_read_the_data
Roles:
    deploy/test_provisioning.py test_who_may_do_what
    flare/test_provisioned.py test_a_member_may_not_submit
Console:
    flare/test_console.py test_no_command_is_without_authorization
        test_every_command_is_given_by_those_for_whom_it_is_meant
Audit log:
    flare/test_audit_log.py
    flare/test_console.py test_an_account_gives_so_many_commands
    flare/test_perimeter.py test_a_flood_of_messages_does_not_fill_the_disk
No code in a job:
    flare/test_provisioned.py test_a_site_refuses_a_job_with_custom_code
Files of a job:
    flare/test_perimeter.py test_an_unfit_job_is_refused_before_it_is_unpacked_and_parsed
        test_a_job_as_flare_packs_it_is_fit test_the_name_of_a_job_can_be_shown
    flare/test_job_check.py test_the_files_of_a_job
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
Encrypted sums:
    flare/test_encryption.py test_a_sum_of_fewer_updates_than_the_quorum_is_none
        test_an_update_of_no_records_is_none_of_the_quorum
    deploy/test_envelope.py test_a_job_that_needs_too_few_sites_is_refused
Word embedding:
    flare/test_policies.py test_the_shipped_policy_sends_the_words_as_they_came
    deploy/test_envelope.py test_the_words_of_an_update_stay_where_the_site_wants_that
Digits of figures:
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
    deploy/test_installed.py test_the_program_is_the_wheels_and_runs_nothing_of_what_it_looks_at
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
    faults/test_wire.py test_a_value_that_is_no_tensor_costs_its_site_alone
S6, ciphertexts of zeros, noise, flipped bytes; values times 10,000. It did: the run ended; weights grew 7,600 times:
    flare/test_encryption.py test_a_bad_ciphertext_costs_its_site_the_round_and_not_the_run
        test_a_change_beyond_the_sites_own_limits_is_not_encrypted
        test_what_only_the_key_can_see_is_seen_at_the_honest_sites
S7, finite weights of 3e38 from one site. It did: every site answered NaN, and the only checkpoint held that mean:
    faults/test_poison.py test_by_default_it_goes_no_further_than_five_of_an_honest_sites_steps
    run/test_rollback.py test_a_poisoned_round_is_undone_by_one_command
    methods/test_pms_fm.py test_one_huge_gradient_does_not_stop_the_selector_for_good
    studies/rivals/test_fedfed.py test_pairs_that_would_spoil_the_pool_are_dropped_and_named
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

FAULTS = """
Row 1:
    faults/test_updates.py test_a_bad_update_is_dropped_and_named_and_the_run_goes_on_without_it
        test_every_method_drops_it
    core/test_gate.py test_the_count_of_bad_values_is_told
Row 2:
    faults/test_updates.py test_a_bad_update_is_dropped_and_named_and_the_run_goes_on_without_it
    core/test_gate.py test_refused_tensors_are_named
Row 3:
    core/test_gate.py test_of_many_wrong_keys_three_are_listed
    federation/test_loop.py test_a_tensor_that_this_phase_does_not_share_is_refused
Row 4:
    faults/test_updates.py test_a_bad_update_is_dropped_and_named_and_the_run_goes_on_without_it
    faults/test_wire.py test_row_4_a_stale_reply_changes_nothing_then_or_later_with_any_codec
        test_row_4_flare_hands_on_a_reply_of_another_task_and_it_is_refused
        test_row_4_a_second_reply_in_one_phase_is_refused_whatever_it_holds test_row_4_a_second_reply_is_told_of
    federation/test_loop.py test_a_duplicate_or_a_reply_of_a_stranger_does_not_count
Row 5:
    flare/test_messages.py test_the_sites_name_is_the_channels_whatever_the_reply_says
Row 6:
    methods/test_robust.py test_nobody_captures_the_weights test_a_claimed_loss_counts_as_the_cap_at_most
        test_the_weights_are_logged_in_every_record
Row 7:
    faults/test_updates.py test_row_7_a_cap_on_samples test_row_7_a_count_is_pinned_by_the_first_reply
        test_row_7_no_site_has_more_than_its_share
    faults/test_wire.py test_row_7_a_count_that_is_none_is_refused_after_the_wire
        test_row_7_0_samples_weigh_nothing_whatever_they_come_with
    faults/test_sites.py test_rows_7_and_9_a_site_with_zero_records_is_named_left_out_and_changes_nothing
Row 8:
    faults/test_updates.py test_row_8_nobody_has_samples_the_model_stays
        test_row_8_it_is_warned_of_once_and_stops_after_some_phases
Row 9:
    faults/test_updates.py test_row_9_a_site_may_come_and_go
    federation/test_exchange.py test_a_worker_that_dies_in_a_task_costs_its_site_that_phase_only
    flare/test_controller.py test_a_site_later_than_the_grace_is_dropped_and_named
        test_a_site_that_is_started_again_gets_its_task_again_and_answers
    faults/test_consortium.py test_rows_9_and_36_a_child_that_is_killed_or_hangs_costs_its_site_that_phase
        test_rows_9_23_and_35_aborted_a_site_killed_its_server_killed_it_ends_with_the_same_bytes
Row 10:
    faults/test_updates.py test_row_10_below_the_quorum_nothing_is_kept_and_it_resumes
    flare/test_controller.py test_below_the_quorum_nothing_is_kept_and_the_same_job_resumes
    flare/test_simulator.py test_a_lost_quorum_fails_the_job_and_the_same_job_resumes
Row 11:
    faults/test_poison.py test_by_default_it_goes_no_further_than_five_of_an_honest_sites_steps
        test_a_robust_average_lies_between_honest_values test_no_sites_own_model_is_poisoned_by_another
        test_what_the_server_distils_is_never_longer_than_one_honest_vector
    faults/test_updates.py test_row_11_what_one_finite_site_can_do_is_its_share
        test_row_11_by_default_it_can_do_no_more_than_five_honest_sites test_row_11_a_long_change_is_shortened
    run/test_rollback.py test_a_poisoned_round_is_undone_by_one_command
Row 12:
    objectives/test_convirt.py test_absent_modality_is_skipped
    models/test_dual_encoder.py test_missing_modalities
    data/test_loader.py test_a_missing_modality_is_a_missing_key
    methods/test_creamfl.py test_a_round_without_suppliers_of_a_modality_completes
Row 13:
    data/test_loader.py test_the_smaller_rest_of_an_epoch_is_dropped_and_a_small_split_is_one_batch
    objectives/test_convirt.py test_small_batches_give_zero_and_a_gradient
    models/test_dual_encoder.py test_batch_norm_head_says_what_to_do_about_one_sample
Row 14:
    data/sources/test_table.py test_unusable_rows_are_skipped_and_counted
        test_too_many_unusable_rows_stop_with_counts_and_numbers_of_rows
Row 15:
    data/sources/test_table.py test_too_many_unusable_rows_stop_with_counts_and_numbers_of_rows
        test_wrong_columns_are_named_but_never_those_of_the_file
Row 16:
    data/test_radiograph.py test_truncated_empty_foreign_missing_and_constant_files test_dicom_refusals
        test_the_same_numbers_have_the_same_grey_levels_in_every_file
        test_transfer_syntaxes_that_cannot_be_judged_or_decoded_are_refused
Row 17:
    data/test_radiograph.py test_a_bomb_is_refused_from_its_header
Row 18:
    data/test_deid.py test_no_tag_of_a_dicom_file_is_kept test_training_is_blocked_until_the_risk_is_accepted
    data/test_radiograph.py test_dicom_refusals
    data/test_burned_in.py test_what_identifies_is_found test_a_film_and_its_markers_pass
        test_films_with_an_identity_are_left_out_and_counted test_the_site_accepts_them_by_a_setting_of_its_own_file
        test_without_the_extra_it_is_said_that_nobody_looked
    flare/test_smoke.py test_nobody_is_named_in_any_file_or_byte_sent
    flare/test_phi.py test_an_engine_run_names_nobody
Row 19:
    faults/test_exceptions.py test_no_reply_no_log_and_no_file_of_the_server_has_them
        test_none_comes_out_of_a_training_process test_a_hospital_whose_files_are_wrong_names_nobody
        test_so_it_is_when_a_film_fails_while_it_is_trained_on
    flare/test_messages.py test_only_public_words_leave_a_site
    flare/test_child_protocol.py test_a_failure_comes_back_in_fedvlps_words_only
    deploy/test_provisioning.py test_nothing_streams_to_the_server_and_no_store_is_shared
Row 20:
    data/sources/test_table.py test_drawn_splits_are_disjoint_by_patient_and_repeatable
        test_a_patient_in_two_given_splits_is_refused
    data/test_partition.py test_rows_of_a_group_stay_together
Row 21:
    evaluation/test_classification.py
        test_findings_with_one_class_are_skipped_by_name_and_unknown_labels_left_out
Row 22:
    faults/test_full_disk.py test_the_run_stops_and_goes_on_where_it_was
        test_the_checkpoints_kept_for_a_rollback_make_room_first test_so_it_does_where_a_file_may_not_grow
        test_a_site_misses_the_phase_and_goes_on_from_its_last_memory
        test_a_read_only_kit_is_called_so_at_every_folder_that_a_job_writes
        test_side_by_side_a_sites_own_process_says_so test_updates_that_wait_on_disk_have_no_room
        test_at_the_server_the_job_ends_with_the_reason_and_the_next_one_goes_on
        test_the_command_exits_with_2_and_one_line_and_resumes test_curves_without_room_hide_no_other_error
    core/test_checkpoint.py test_a_full_disk_leaves_the_old_file_and_no_rubbish
    flare/test_results.py test_a_full_disk_is_told_and_the_run_stays_whole
Row 23:
    core/test_history.py test_killed_between_history_and_checkpoint_it_goes_on_to_the_same_bytes
    federation/test_exchange.py test_killed_at_any_moment_and_resumed_is_uninterrupted
    flare/test_schedules.py test_every_schedule_ends_with_the_engines_bytes_or_a_named_refusal
    faults/test_consortium.py
        test_rows_9_23_and_35_aborted_a_site_killed_its_server_killed_it_ends_with_the_same_bytes
Row 24:
    federation/test_site.py test_a_new_process_goes_on_from_the_disk
    faults/test_updates.py test_row_24_a_corrupt_memory_costs_its_site_and_is_named
    flare/test_simulator.py test_same_bytes_as_the_engine
Row 25:
    run/test_simulate.py test_runs_are_numbered
    flare/test_jobs.py test_a_folder_that_is_not_a_job_is_left_alone
Row 26:
    core/test_checkpoint.py test_a_pickle_is_refused_and_never_run
    test_architecture.py test_nothing_is_unpickled
Row 27:
    faults/test_hostile_settings.py test_row_27_no_text_of_a_job_opens_a_file_outside_of_the_kit
        test_row_27_no_setting_of_a_site_leads_out
    deploy/test_site_config.py test_no_path_leads_out_of_the_sites_root
    data/sources/test_table.py test_images_may_not_leave_the_root
Row 28:
    deploy/test_site_config.py test_a_provisioned_site_opens_no_path_that_a_job_brings
        test_an_unknown_name_is_refused_with_the_nearest
    faults/test_hostile_settings.py test_row_28_a_job_names_a_data_set_of_this_site_and_no_other
        test_row_28_the_servers_name_for_a_run_opens_no_other_folder
Row 29:
    flare/test_class_list.py test_a_hostile_job_is_refused_before_it_starts_with_an_audit_line
    faults/test_hostile_settings.py test_row_29_a_part_by_name_is_refused_before_the_job_starts_and_by_flare
        test_row_29_custom_code_is_refused_to_every_role test_row_29_flares_process_asks_the_check_of_jobs_too
        test_row_29_the_words_say_which_class_and_which_file_to_edit
    flare/test_provisioned.py test_a_site_refuses_a_job_with_custom_code
        test_a_site_refuses_a_class_that_is_not_on_its_list
Row 30:
    run/test_config.py test_an_unknown_key_is_refused_with_the_nearest
    training/test_local_training.py test_bad_hyper_parameters_fail_when_they_are_built
    flare/test_executor.py test_the_task_of_another_experiment_or_version_is_refused
Row 31:
    flare/test_executor.py test_the_task_of_another_experiment_or_version_is_refused
Row 32:
    run/test_public_set.py test_another_public_set_is_refused_by_the_site
    methods/test_creamfl_faults.py test_representations_of_another_order_of_the_public_set_carry_another_id
Row 33:
    methods/test_creamfl.py test_nothing_but_representations_of_the_public_set_leaves_a_site
    core/test_gate.py test_refused
Row 34:
    faults/test_privacy.py test_a_policy_that_gives_no_privacy_starts_no_job
        test_what_flare_passes_over_in_silence_the_doctor_fails test_a_type_that_noise_does_not_protect_stays
        test_so_little_noise_that_one_release_is_all_the_budget_lets_nothing_go
        test_a_budget_that_ends_in_the_middle_of_a_job_ends_it_for_that_site_in_every_job
    flare/test_privacy_filters.py test_at_the_budget_nothing_leaves_in_whatever_job
        test_whatever_is_no_update_is_refused
Row 35:
    training/test_local_training.py test_stops_between_steps
    cli/test_cli.py test_ctrl_c_ends_every_process_and_the_run_goes_on
    flare/test_controller.py test_aborted_at_any_moment_it_is_resumed_to_the_same_bytes
    faults/test_interrupt.py test_row_35_ctrl_c_ends_all_processes_and_the_same_command_goes_on
    faults/test_consortium.py
        test_rows_9_23_and_35_aborted_a_site_killed_its_server_killed_it_ends_with_the_same_bytes
Row 36:
    faults/test_sites.py test_row_36_no_memory_left_says_what_to_do
    faults/test_consortium.py test_rows_9_and_36_a_child_that_is_killed_or_hangs_costs_its_site_that_phase
Row 37:
    models/test_image.py test_unreachable_hub_says_what_to_do
    models/test_text.py test_family_parameters_without_network
Row 38:
    data/sources/test_table.py test_exports_are_read_as_what_they_are_and_it_is_said
        test_what_cannot_be_told_is_asked_for test_a_report_longer_than_csv_reads_by_itself_is_read
    data/test_loader.py test_reports_that_are_cut_are_counted_once_a_split
"""

OPENING = """# Evidence

The tests that show each statement of [security](security.md), [PRIVACY](../provisioning/PRIVACY.md) and the [table of
faults](../tests/faults/README.md): a file below `tests/`, and what its tests are called.
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
    sections = {"Guards": GUARDS, "Attacks that were run": ATTACKS, "Who can learn what": PARTIES, "Faults": FAULTS}
    return "\n".join([OPENING, *(table(title, text) for title, text in sections.items())])
